"""`raafl report`: run folders read back, and one self-contained HTML page made of them.

folder.py reads what is there, `times.py` says who did what when, `groups.py` which runs belong together, `curves.py`,
`clients.py`, `submodels.py` and `overview.py` make charts and tables, `page.py` the page.
"""
