"""Self-contained HTML: no script from elsewhere, no request, readable on a phone."""
