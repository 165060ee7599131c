"""Memory: predicted before a run, measured during it, explained after. The core never imports this package."""
