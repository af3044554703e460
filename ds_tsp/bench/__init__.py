"""``ds_tsp bench``: training steps of TSP and METP beside the schemes they replace, in one run. See docs/benchmarks."""
