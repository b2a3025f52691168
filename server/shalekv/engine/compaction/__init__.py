"""Running compactions: what a policy picks is read, merged and written (protocol, "Compacting")."""
