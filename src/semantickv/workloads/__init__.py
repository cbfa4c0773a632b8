"""Generated traffic: made-up families of prompts, real text with drawn arrivals, and a mock help desk.

Everything that is drawn comes from a seed; nothing here is measured or cached.
"""
