"""Files and pictures of simulated results: experiments, replays and the advice page.

Nothing here simulates; ``analysis`` does.
"""
