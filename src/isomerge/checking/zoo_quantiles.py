"""What means of two models lost in a zoo of pairs: quantiles by distance, made by `benchmarks/zoo.py --fit`.

One knot a row: the distance, and the tenth, the middle and the ninetieth percentile of the loss above the parents',
divided by the logarithm of the number of outputs. All three rise with the distance.
"""

PAIRS = 306
KNOTS = (
    (0.05, 0, 0.006269, 0.05578),
    (0.1, 0, 0.03913, 0.1086),
    (0.15, 0, 0.03913, 0.1434),
    (0.2, 0, 0.1393, 0.2063),
    (0.3, 0, 0.1958, 0.2247),
    (0.4, 0, 0.3015, 0.3434),
    (0.6, 0.008261, 0.4011, 1.099),
    (0.8, 0.008261, 0.4208, 1.099),
    (1, 0.1346, 0.7829, 1.099),
    (1.2, 0.6567, 0.8265, 1.107),
    (1.41, 0.6567, 0.8265, 1.107),
)
