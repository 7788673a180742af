"""Sets of runs: what an experiment file asks for, calibration, launching, predicted times."""
