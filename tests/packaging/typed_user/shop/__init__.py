"""A user's project, as type checkers read it: it is checked, never run."""
