"""Plans: interventions as data.

`values` defines plans and checks them against a model, `wire` packs them, and `compile` lists the ops of each row. `ops` has the kinds of
edits. `program` defines row-wise functions as data; `rowwise` and `checking` check them, and `running` runs them.
"""
