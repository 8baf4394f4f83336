"""Make one self-contained HTML page from run folders (`raafl report`).

`times.py` computes who did what when, `groups.py` which runs belong together, `curves.py`, `clients.py`, `submodels.py` and
`overview.py` make charts and tables, `page.py` writes the page.
"""
