"""Run the same simulated training in other simulators of federated learning and in raafl, and compare CPU seconds.

README.md says what to install and what came of it. Each `with_NAME.py` runs in the environment of that peer and imports nothing of
raafl (`with_raafl.py` excepted).
"""
