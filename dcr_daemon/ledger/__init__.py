"""The only source of truth: records, their fold, append, follow, and verified reads of what seals name."""
