"""What the scripts of bench/ share: reports, real texts, an oracle, and engines in processes of their own."""
