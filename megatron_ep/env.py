"""`python -m megatron_ep.env`: the report of `megatron-ep env`, also where that command or torch is not installed."""

from megatron_ep.diagnosis.env import render

if __name__ == "__main__":
    print(render())
