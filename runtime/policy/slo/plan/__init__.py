"""Plan the order of waiting groups over the queues of several cells (QLM, section 7).

problem.py      what is planned, and what a plan is
tables.py       a problem as flat columns of integers; `scenarios.py` draws its times
kernel.py       the cost of an order and the search, as plain functions; `compiled.py` compiles the same ones
evaluation.py   the one exact evaluator of all solvers
insertion.py, annealing.py, repair.py       heuristics, and what becomes of a plan that is late
cp_sat.py, milp.py, paper.py                exact solvers (extras `cp-sat`, `plan`), and the paper's own formulation
"""
