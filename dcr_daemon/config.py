"""Settings: TOML file, environment, flags into frozen records."""
