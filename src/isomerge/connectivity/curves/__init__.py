"""Sets of models on which the loss is low: curves between two models, and simplexes around them.

shapes.py       which mixture of vertices is a point: Bézier curves, chains, simplexes
space.py        the module, its vertices, and the ones that learn
goals.py        the loss of a point: on labels, beside the parents' predictions, or by a function
perturbation.py noise or an attack on the inputs, for paths that resist it
volume.py       of simplexes
bezier.py, chain.py, autoneb.py, simplex.py, subspace.py, geodesic.py   one method each
methods.py      their table
parts.py        what is learned from and what is measured on
written.py      any point as a checkpoint
"""
