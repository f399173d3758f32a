"""Running a verified schedule: groups, transfers, stages, executor and gradient reduction."""
