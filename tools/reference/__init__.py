"""Writers of the pages under docs/reference; a page is made from the code and a test fails when it is stale."""
