"""sitecustomize: programs that thunder's tests start can import thunder on current torch too."""
import jointtrace  # noqa: F401
