"""What measures and predicts, but takes no part in a training: benchmarks, the performance model, the load table of a
routing trace, and the examination of a network. Only the command line imports this package."""
