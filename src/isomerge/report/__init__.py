"""Records to tables, model cards, curves and pages.

The package is callable: `isomerge.report(folder)` is `isomerge.report.page.report`.
"""

from isomerge.verbs import answers_calls

answers_calls(__name__, "isomerge.report.page")
