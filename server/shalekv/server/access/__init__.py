"""Access control: identities, permissions and quotas of callers, and the audit log."""
