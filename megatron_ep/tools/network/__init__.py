"""`megatron-ep check --network`: every pair of machines of a job is measured before the job runs."""
