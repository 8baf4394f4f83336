"""`raafl compare`: rows of settings over several seeds, with an equal search for each, and honest statistics.

`comparison.py` reads the file, `search.py` finds each row's settings, `runs.py` runs and resumes, `statistics.py` and
`results.py` say what the runs show, `tables.py` and `page.py` write it down.
"""
