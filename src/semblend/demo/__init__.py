"""Shows on a real small model what reuse gains and what it costs: `semblend demo`, and the prompts of `calibrate`."""
