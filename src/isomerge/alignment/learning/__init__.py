"""Learned alignment: gradient steps on the symmetry itself, towards a midpoint that predicts as its ends do.

parameters.py, orders.py    what may learn in each space, and the exact element it stands for
learned_transform.py        all spaces together
path_model.py               (1 − t)·A + t·g(B) in the stock class, as a function of g
path_loss.py                its predictions beside those of the two models
steps.py                    the steps, and what is kept of them

Only the source learns. For every symmetry h and g, the mean of h·A and g·B is h applied to the mean of A and h⁻¹g·B, as
h acts on weights by a linear map; and h changes no function, not even that of the mean. So two transforms reach no
midpoint that one does not.
"""
