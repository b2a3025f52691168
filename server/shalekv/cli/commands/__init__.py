"""Commands, one module each (or several for a group), imported when called."""
