"""The typed, documented schema of a run, the command line, and one YAML file per workload."""
