"""Tools that measure and predict, and take no part in training: benchmarks, the performance model, the load table of a
routing trace, and the examination of a network. Only the command line imports this package."""
