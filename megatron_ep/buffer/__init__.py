"""Buffers: launching the calls of the ranks that a process has, and what follows when one fails."""
