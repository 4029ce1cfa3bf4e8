"""What listens to events: logs, metrics, health, systemd."""
