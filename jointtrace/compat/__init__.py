"""compat: lightning-thunder 0.2.6 on current torch; one file per break, each with the torch versions it holds for."""
