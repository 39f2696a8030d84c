"""Plans: interventions as data. `values` defines them, `checks` compares them with a model, `compile` lists the ops of each row."""
