"""Who may call: tokens, their limits, certificates, and the files that these come from (docs/security.md)."""
