# One static binary on nothing: no shell, no libc, no package that wants updates.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --locked --profile dist --features otel --config packaging/static.toml --target-dir /build \
 && sh packaging/tree.sh /build/*-linux-gnu/dist/exeat /tree

FROM scratch
COPY --from=build /tree/root/ /
# A volume that is made for it takes over owner and mode.
COPY --from=build --chown=65532:65532 /tree/state/ /var/lib/
USER 65532:65532
# The root may be read-only: temporary files of `exeat demo` go where the state goes.
ENV EXEAT_CONFIG=/etc/exeat/exeat.toml STATE_DIRECTORY=/var/lib/exeat TMPDIR=/var/lib/exeat
VOLUME /var/lib/exeat
EXPOSE 3128
HEALTHCHECK --interval=10s --timeout=6s --start-period=5s CMD ["/exeat", "health"]
ENTRYPOINT ["/exeat"]
CMD ["serve"]
