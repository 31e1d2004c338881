"""Diagnosis of failures: `failures.py` keeps failures that no call has raised, `blame.py` finds the rank that caused a
timeout, `env.py` reports on the machine. Imports the standard library only.
"""
