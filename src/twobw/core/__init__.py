"""Schedules as plain data, their checker and their simulator. Standard library only."""
