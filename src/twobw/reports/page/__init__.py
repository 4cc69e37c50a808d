"""The report of a run or a plan as one HTML page that needs nothing else."""
