//! The ports that network verbs may use, checked before the proxy is asked.

/// The permitted ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ports {
    /// 80 and 443, as mk8.shell specifies. The commands use this.
    #[default]
    Usual,
    /// All ports that the proxy allows. For tests, whose origins have other ports.
    Any,
}

impl Ports {
    pub(super) fn admit(self, port: u16) -> bool {
        self == Self::Any || matches!(port, 80 | 443)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ports_are_standard() {
        for port in [80, 443] {
            assert!(Ports::Usual.admit(port));
        }
        for port in [0, 1, 22, 79, 81, 442, 444, 8080, 8443, 65535] {
            assert!(!Ports::Usual.admit(port), "{port}");
            assert!(Ports::Any.admit(port));
        }
        assert_eq!(Ports::default(), Ports::Usual);
    }
}
