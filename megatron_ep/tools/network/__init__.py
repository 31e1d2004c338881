"""`megatron-ep check --network`: measures every pair of machines of a job before the job runs."""
