"""One night's work: the controller, its journal and state, budget, jobs, results, what is kept."""
