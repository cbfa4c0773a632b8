"""A demonstration on a real small model: `semblend demo`, and the prompts of `semblend calibrate`.

Nothing else imports from here.
"""
