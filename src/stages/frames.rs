//! The frames of a WebSocket connection (RFC 6455 §5.2), found without keeping their payload.

/// Follows one direction of a connection on which no extension is in use.
pub(super) struct Frames {
    /// Clients mask what they send, servers do not.
    masked: bool,
    /// A message has begun and not ended.
    fragmented: bool,
    closed: bool,
    at: At,
}

enum At {
    /// So many bytes of a head are here.
    Head([u8; MAX_HEAD], usize),
    Payload {
        head: FrameHead,
        at: u64,
    },
}

const MAX_HEAD: usize = 14;
const CONTINUATION: u8 = 0;
const CLOSE: u8 = 8;

/// A frame's head.
#[derive(Clone, Copy)]
pub(super) struct FrameHead {
    bytes: [u8; MAX_HEAD],
    size: usize,
    mask: Option<[u8; 4]>,
    length: u64,
}

/// What the next bytes are.
pub(super) enum Piece<'b> {
    Head(FrameHead),
    /// Bytes of a payload, which stand `at` so many bytes within it.
    Payload {
        head: FrameHead,
        bytes: &'b [u8],
        at: u64,
        last: bool,
    },
}

/// The bytes are not frames as they should be.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Broken;

impl FrameHead {
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.size).unwrap_or_default()
    }

    pub(super) fn is_control(&self) -> bool {
        self.opcode() >= 8
    }

    /// True for the last frame of a message.
    pub(super) fn is_final(&self) -> bool {
        let [first, ..] = self.bytes;
        first & 0x80 != 0
    }

    /// Appends payload bytes, which stand `at` so many bytes within it, as they are meant.
    pub(super) fn unmask_onto(&self, text: &mut Vec<u8>, bytes: &[u8], at: u64) {
        let Some(mask) = self.mask else { return text.extend_from_slice(bytes) };
        let skip = usize::try_from(at % 4).unwrap_or_default();
        text.extend(bytes.iter().zip(mask.iter().cycle().skip(skip)).map(|(byte, mask)| byte ^ mask));
    }

    fn opcode(&self) -> u8 {
        let [first, ..] = self.bytes;
        first & 0x0f
    }
}

impl Frames {
    pub(super) fn of_client() -> Self {
        Self { masked: true, fragmented: false, closed: false, at: At::Head([0; MAX_HEAD], 0) }
    }

    pub(super) fn of_origin() -> Self {
        Self { masked: false, ..Self::of_client() }
    }

    /// True once a close frame has begun.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// True if no frame is under way.
    pub(super) fn is_between(&self) -> bool {
        matches!(self.at, At::Head(_, 0))
    }

    /// Takes the next piece from the front of the bytes; none once they are used up.
    pub(super) fn next<'b>(&mut self, rest: &mut &'b [u8]) -> Result<Option<Piece<'b>>, Broken> {
        match self.at {
            At::Head(mut bytes, mut size) => {
                while let Some((byte, behind)) = rest.split_first() {
                    if let Some(place) = bytes.get_mut(size) {
                        *place = *byte;
                    }
                    size = size.saturating_add(1);
                    *rest = behind;
                    if let Some(head) = self.read(bytes, size)? {
                        self.at = At::Payload { head, at: 0 };
                        return Ok(Some(Piece::Head(head)));
                    }
                }
                self.at = At::Head(bytes, size);
                Ok(None)
            }
            At::Payload { head, at: begin } => {
                let left = head.length.saturating_sub(begin);
                if rest.is_empty() && left > 0 {
                    return Ok(None);
                }
                let n = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                let (bytes, behind) = rest.split_at(n);
                *rest = behind;
                let at = begin.saturating_add(n as u64);
                let last = at == head.length;
                self.at = if last { At::Head([0; MAX_HEAD], 0) } else { At::Payload { head, at } };
                Ok(Some(Piece::Payload { head, bytes, at: begin, last }))
            }
        }
    }

    /// A head, once all of it is here.
    fn read(&mut self, bytes: [u8; MAX_HEAD], size: usize) -> Result<Option<FrameHead>, Broken> {
        let [first, second, ..] = bytes;
        if size < 2 {
            return Ok(None);
        }
        let (opcode, is_final, masked) = (first & 0x0f, first & 0x80 != 0, second & 0x80 != 0);
        let short = second & 0x7f;
        let extended = match short {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        let mask_at = extended + 2_usize;
        let whole = if masked { mask_at.saturating_add(4) } else { mask_at };
        let control = opcode >= 8;
        let known = matches!(opcode, 0..=2 | 8..=10);
        if first & 0x70 != 0 || !known || masked != self.masked || (control && (!is_final || short > 125)) {
            return Err(Broken);
        }
        if !control && (opcode == CONTINUATION) != self.fragmented {
            return Err(Broken);
        }
        if size < whole {
            return Ok(None);
        }
        let number = bytes.get(2..mask_at).unwrap_or_default().iter().fold(0, |n, byte| (n << 8) | u64::from(*byte));
        let length = if extended == 0 { u64::from(short) } else { number };
        // The shortest form only, and no sign bit.
        let too_short = match extended {
            2 => length < 126,
            8 => length <= 0xffff || length >> 63 != 0,
            _ => false,
        };
        if too_short {
            return Err(Broken);
        }
        self.closed |= opcode == CLOSE;
        if !control {
            self.fragmented = !is_final;
        }
        let mask = bytes.get(mask_at..whole).and_then(|mask| <[u8; 4]>::try_from(mask).ok());
        Ok(Some(FrameHead { bytes, size: whole, mask, length }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Heads and payloads of a direction, however it is cut.
    fn read<'b>(
        mut frames: Frames,
        cuts: impl IntoIterator<Item = &'b [u8]>,
    ) -> Result<Vec<(u8, bool, Vec<u8>)>, Broken> {
        let mut found: Vec<(u8, bool, Vec<u8>)> = Vec::new();
        for mut rest in cuts {
            while let Some(piece) = frames.next(&mut rest)? {
                match piece {
                    Piece::Head(head) => found.push((head.opcode(), head.is_final(), Vec::new())),
                    Piece::Payload { head, bytes, at, .. } => {
                        head.unmask_onto(&mut found.last_mut().unwrap().2, bytes, at);
                    }
                }
            }
        }
        Ok(found)
    }

    #[test]
    fn frames_are_read_as_the_rfc_shows_them() {
        // RFC 6455 §5.7.
        type Row<'a> = (&'a [u8], bool, Option<Vec<(u8, bool, &'a [u8])>>);
        let rows: [Row<'_>; 14] = [
            (b"\x81\x05Hello", false, Some(vec![(1, true, b"Hello")])),
            (b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58", true, Some(vec![(1, true, b"Hello")])),
            (b"\x01\x03Hel\x80\x02lo", false, Some(vec![(1, false, b"Hel"), (0, true, b"lo")])),
            (
                b"\x01\x03Hel\x89\x02hi\x80\x02lo",
                false,
                Some(vec![(1, false, b"Hel"), (9, true, b"hi"), (0, true, b"lo")]),
            ),
            (b"\x88\x00\x82\x00", false, Some(vec![(8, true, b""), (2, true, b"")])),
            (b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58", false, None),
            (b"\x81\x05Hello", true, None),
            (b"\xc1\x05Hello", false, None),
            (b"\x83\x00", false, None),
            (b"\x09\x00", false, None),
            (b"\x89\x7e\x00\x80", false, None),
            (b"\x80\x00", false, None),
            (b"\x01\x00\x01\x00", false, None),
            (b"\x82\x7e\x00\x05Hello", false, None),
        ];
        for (bytes, masked, want) in rows {
            let frames = || if masked { Frames::of_client() } else { Frames::of_origin() };
            let want =
                want.map(|list| list.into_iter().map(|(code, last, text)| (code, last, text.to_vec())).collect());
            assert_eq!(read(frames(), [bytes]).ok(), want, "{bytes:02x?}");
            assert_eq!(read(frames(), bytes.chunks(1)).ok(), want, "{bytes:02x?} in pieces");
        }
        let long = [&b"\x82\x7f\0\0\0\0\0\x01\0\0"[..], &[7; 65536]].concat();
        assert_eq!(read(Frames::of_origin(), [&long[..]]).unwrap(), [(2, true, vec![7; 65536])]);
        assert!(read(Frames::of_origin(), [&b"\x82\x7f\x80\0\0\0\0\x01\0\0"[..]]).is_err());
        assert!(read(Frames::of_origin(), [&b"\x82\x7f\0\0\0\0\0\0\xff\xff"[..]]).is_err());
    }

    proptest! {
        #[test]
        fn whole_equals_cut_anywhere(payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 1..5), mask: [u8; 4], at in 0_usize..1000) {
            let mut wire = Vec::new();
            for payload in &payloads {
                wire.push(0x82);
                match u8::try_from(payload.len()).ok().filter(|length| *length < 126) {
                    Some(length) => wire.push(0x80 | length),
                    None => {
                        wire.push(0x80 | 126);
                        wire.extend(u16::try_from(payload.len()).unwrap().to_be_bytes());
                    }
                }
                wire.extend(mask);
                wire.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
            }
            let want: Vec<_> = payloads.into_iter().map(|payload| (2, true, payload)).collect();
            let (head, tail) = wire.split_at(at.min(wire.len()));
            prop_assert_eq!(read(Frames::of_client(), [head, tail]).unwrap(), want.clone());
            prop_assert_eq!(read(Frames::of_client(), wire.chunks(1)).unwrap(), want);
        }
    }
}
