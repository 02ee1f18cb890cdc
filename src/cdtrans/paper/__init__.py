"""The paper's printed tables, the settings of its ablations, and its Fig. 2a."""
