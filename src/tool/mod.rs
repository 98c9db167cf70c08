//! The tool front-end: a thin client of the proxy.
