"""Plans: interventions as data. `values` says what there is, `checks` whether a model can do it, `compile` what each row gets."""
