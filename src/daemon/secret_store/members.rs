//! JSON objects with secrets. A member that occurs twice is an error, because programs differ in which one counts.

use std::fmt;

use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use zeroize::Zeroizing;

use crate::model::secret::Secret;
use crate::stages::mint::MintError;

/// The members of an object, without what is in other values than texts.
#[derive(Default)]
pub(super) struct Members(Vec<(String, Member)>);

/// The value of a member.
enum Member {
    Text(Zeroizing<String>),
    Other,
}

impl Members {
    /// Returns a copy of the text of a member.
    pub(super) fn text(&self, name: &str) -> Result<Secret, MintError> {
        match self.0.iter().find(|(known, _)| known == name) {
            Some((_, Member::Text(text))) => Ok(Secret::new(text.as_bytes().to_vec())),
            Some((_, Member::Other)) => Err(MintError::lasting("the field is not a text")),
            None => Err(MintError::lasting("the item has no such field")),
        }
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
        let mut members: Vec<(String, Member)> = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            members.push((name, map.next_value()?));
        }
        let mut names: Vec<&String> = members.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        if names.windows(2).any(|pair| matches!(pair, [one, other] if one == other)) {
            return Err(A::Error::custom("a member occurs twice"));
        }
        Ok(Members(members))
    }
}

impl<'de> Deserialize<'de> for Member {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MemberVisitor)
    }
}

struct MemberVisitor;

impl<'de> Visitor<'de> for MemberVisitor {
    type Value = Member;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Member, E> {
        Ok(Member::Text(Zeroizing::new(text.to_owned())))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Member, E> {
        Ok(Member::Text(Zeroizing::new(text)))
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Member, E> {
        Ok(Member::Other)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Member, E> {
        Ok(Member::Other)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Member, E> {
        Ok(Member::Other)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Member, E> {
        Ok(Member::Other)
    }

    fn visit_unit<E: Error>(self) -> Result<Member, E> {
        Ok(Member::Other)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Member, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Member::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Member, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Member::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_found_and_repeated_members_are_not_accepted() {
        let text = r#"{"a":"x","n":1,"o":{"a":"y"},"l":[1,"z"],"z":null,"b":true,"f":1.5,"i":-1}"#;
        let members: Members = serde_json::from_str(text).unwrap();
        assert_eq!(members.text("a").ok().unwrap().expose(), b"x");
        for name in ["n", "o", "l", "z", "b", "f", "i"] {
            assert_eq!(members.text(name).err().unwrap().reason, "the field is not a text", "{name}");
        }
        assert_eq!(members.text("x").err().unwrap().reason, "the item has no such field");
        for text in [r#"{"a":"x","b":"y","a":"z"}"#, "[]", "\"a\"", "null"] {
            assert!(serde_json::from_str::<Members>(text).is_err(), "{text}");
        }
    }
}
