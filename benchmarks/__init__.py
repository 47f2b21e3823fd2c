"""What is claimed of hetjax, as commands that print the figure.

Each is run from the repository's root, as `python -m benchmarks.overhead` or `python benchmarks/overhead.py`;
`--help` lists its sizes and `--quick` tries it out in seconds. The last line printed is JSON: the figures by
name.
"""
