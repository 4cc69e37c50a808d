"""What runs a schedule: stages, versioned weights, transports, the executor, `Pipeline`."""
