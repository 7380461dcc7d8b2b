"""What others do: their published rules, written again to be compared with.

They are not the products, hence the suffix "-style"; docs/scheduling.md says what was left out.
"""
