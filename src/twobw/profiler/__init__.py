"""What a model's layers cost on a device: measured on this machine, or computed for another."""
