"""Several HTTP processes in front of one engine's client, on one port."""
