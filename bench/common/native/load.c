/* A cheap load generator for overhead benches: HTTP/1.1 keep-alive, one thread, epoll.
 *
 *   load [-w WARM_UP_S] PORT[,PORT...] CONNECTIONS SECONDS RATE BODY_FILE [HEADER...]
 *
 * RATE 0: closed loop, as many requests as connections are always under way.
 * RATE > 0: open loop, requests a second spread evenly; a request waits for a free connection
 * when all are busy. Free connections are used by turns, so that all of them stay in use; they
 * are shared evenly among the ports. A run of '@' in the body is replaced by a number of as many
 * digits, another for each request, so that prompts share a prefix and then differ.
 *
 * Says "open" once connected and begins when it is told a line (or stdin ends); prints one line
 * of JSON and waits for the end of stdin, so that CPU can be read without the connections' own.
 * Latencies are in us. Gaps are the times between successive pieces with chunks of one stream;
 * they and the chunks are counted from WARM_UP_S to SECONDS. An answer counts when its status is
 * 200 and, for a stream, when [DONE] came; one that did not end is an error.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_SAMPLES 4000000
#define MAX_CONNS 65536
#define MAX_MARK 15
#define GAP_US 10      /* width of a bucket */
#define GAPS 300000    /* buckets; the last takes all longer ones */
#define DRAIN_S 40

typedef struct {
  int fd, busy, head_done, chunked, ok, stream;
  long long left;           /* body bytes still to come, content-length framing */
  double due, first, piece; /* when it should have been sent; first body byte; last chunk */
  char mark[MAX_MARK + 1];  /* this request's number */
  char tail[8192];
  size_t used, sent;
} conn;

static char *request;
static size_t request_len, mark_at, mark_len;
static conn *conns;
static int epfd, n_conns, ports[64], n_ports, flying;
static double *first_us, *total_us, counted_from, counted_to;
static long done, errors, chunks_total, next_mark, n_gaps;
static unsigned gaps[GAPS];
static int idle[MAX_CONNS], idle_first, n_idle; /* a ring */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static void want(conn *c, int what, int op) {
  struct epoll_event e = {.events = what, .data.ptr = c};
  epoll_ctl(epfd, op, c->fd, &e);
}

static int dial(conn *c) {
  int one = 1;
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(ports[(c - conns) % n_ports]),
                           .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (connect(c->fd, (struct sockaddr *)&at, sizeof at)) { perror("connect"); return -1; }
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  want(c, EPOLLIN, EPOLL_CTL_ADD);
  return 0;
}

static void rest(conn *c) {
  c->busy = 0;
  idle[(idle_first + n_idle++) % MAX_CONNS] = c - conns;
}

/* Sends what the socket takes; the rest when it takes more. */
static void push(conn *c) {
  memcpy(request + mark_at, c->mark, mark_len);
  while (c->sent < request_len) {
    ssize_t n = send(c->fd, request + c->sent, request_len - c->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) { want(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD); return; }
    if (n <= 0) return; /* the read side will notice */
    c->sent += n;
  }
}

static void fire(conn *c, double due) {
  c->busy = 1;
  c->head_done = c->chunked = c->ok = c->stream = 0;
  c->used = c->sent = 0;
  c->left = -1;
  c->first = c->piece = 0;
  c->due = due;
  long number = next_mark++;
  for (size_t i = mark_len; i-- > 0; number /= 10) c->mark[i] = '0' + number % 10;
  flying++;
  push(c);
}

static void finish(conn *c, int good) {
  double t = now();
  flying--;
  rest(c);
  if (!good) { errors++; return; }
  if (done < MAX_SAMPLES) {
    first_us[done] = (c->first - c->due) * 1e6;
    total_us[done] = (t - c->due) * 1e6;
  }
  done++;
}

static int count(const char *data, size_t len, const char *what, size_t n) {
  int found = 0;
  const char *at = data, *end = data + len;
  while ((at = memmem(at, end - at, what, n))) { found++; at += n; }
  return found;
}

/* A piece of a stream has come. */
static void took(conn *c, int chunks) {
  double t = now();
  if (!c->first) c->first = t;
  if (!chunks) return;
  if (t >= counted_from && t < counted_to) {
    chunks_total += chunks;
    if (c->piece) {
      double bucket = (t - c->piece) * 1e6 / GAP_US;
      gaps[bucket < GAPS - 1 ? (int)bucket : GAPS - 1]++;
      n_gaps++;
    }
  }
  c->piece = t;
}

/* Keeps the last bytes, for the end mark of a chunked body may be split. */
static int receive(conn *c) {
  char data[65536];
  ssize_t n = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
  if (n < 0 && errno == EAGAIN) return 0;
  if (n <= 0) return -1;
  char *body = data;
  size_t len = n;
  if (!c->head_done) {
    /* A head is small and nearly always whole in the first piece. */
    if (c->used) {
      if (c->used + n >= sizeof data || c->used + n >= sizeof c->tail) return -1;
      memmove(data + c->used, data, n);
      memcpy(data, c->tail, c->used);
      n += c->used;
    }
    char *end = memmem(data, n, "\r\n\r\n", 4);
    if (!end) {
      if ((size_t)n >= sizeof c->tail) return -1;
      memcpy(c->tail, data, c->used = n);
      return 0;
    }
    *end = 0;
    c->head_done = 1;
    c->ok = !strncmp(data, "HTTP/1.1 200", 12);
    char *field = strcasestr(data, "content-length:");
    if (field) c->left = strtoll(field + 15, NULL, 10);
    else c->chunked = 1;
    c->stream = strcasestr(data, "text/event-stream") != NULL;
    body = end + 4;
    len = data + n - body;
    c->used = 0;
  }
  if (!len) { if (c->left == 0) finish(c, c->ok); return 0; }
  took(c, c->chunked ? count(body, len, "\"delta\"", 7) : 0);
  if (!c->chunked) {
    c->left -= len;
    if (c->left <= 0) finish(c, c->ok);
    return 0;
  }
  size_t keep = len < 64 ? len : 64;
  if (c->used + keep > 128) { memmove(c->tail, c->tail + c->used + keep - 128, 128 - keep); c->used = 128 - keep; }
  memcpy(c->tail + c->used, body + len - keep, keep);
  c->used += keep;
  if (c->used >= 5 && !memcmp(c->tail + c->used - 5, "0\r\n\r\n", 5)) {
    int marked = !c->stream || memmem(c->tail, c->used, "[DONE]", 6) != NULL;
    finish(c, c->ok && marked);
  }
  return 0;
}

static int ascending(const void *a, const void *b) {
  double x = *(double *)a, y = *(double *)b;
  return (x > y) - (x < y);
}

static double at(double *sorted, long n, double q) { return n ? sorted[(long)(q * (n - 1))] : 0; }

static double gap_at(double q) {
  long wanted = q * n_gaps, seen = 0;
  for (int k = 0; k < GAPS; k++)
    if ((seen += gaps[k]) > wanted) return (k + .5) * GAP_US;
  return 0;
}

static int prepare(const char *path, char **headers, int n_headers) {
  FILE *file = fopen(path, "rb");
  if (!file) { perror(path); return -1; }
  static char body[4 << 20];
  size_t len = fread(body, 1, sizeof body, file);
  fclose(file);
  request = malloc(len + 16384);
  request_len = sprintf(request, "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n"
                        "content-type: application/json\r\ncontent-length: %zu\r\n", ports[0], len);
  for (int i = 0; i < n_headers; i++) request_len += sprintf(request + request_len, "%s\r\n", headers[i]);
  request_len += sprintf(request + request_len, "\r\n");
  char *mark = memchr(body, '@', len);
  if (mark) {
    mark_at = request_len + (mark - body);
    while (mark_len < MAX_MARK && mark + mark_len < body + len && mark[mark_len] == '@') mark_len++;
  }
  memcpy(request + request_len, body, len);
  request_len += len;
  return 0;
}

/* Everything from the first request to the last answer; seconds it took. */
static double drive(double seconds, double rate) {
  double begin = now(), next = begin;
  struct epoll_event events[512];
  for (;;) {
    double t = now();
    int open = t - begin < seconds;
    if (!open && (!flying || t - begin > seconds + DRAIN_S)) break;
    while (open && n_idle && (rate <= 0 || next <= t)) {
      int k = idle[idle_first];
      idle_first = (idle_first + 1) % MAX_CONNS;
      n_idle--;
      fire(&conns[k], rate > 0 ? next : now());
      if (rate > 0) next += 1 / rate;
    }
    double wait_s = .05;
    if (open && rate > 0 && n_idle) wait_s = next - now();
    struct timespec pause = {0, wait_s < 0 ? 0 : wait_s < .05 ? (long)(wait_s * 1e9) : 50000000};
    int n = epoll_pwait2(epfd, events, 512, &pause, NULL);
    for (int i = 0; i < n; i++) {
      conn *c = events[i].data.ptr;
      if (c->busy && events[i].events & EPOLLOUT) {
        push(c);
        if (c->sent == request_len) want(c, EPOLLIN, EPOLL_CTL_MOD);
      }
      if (!(events[i].events & ~EPOLLOUT) || receive(c) >= 0) continue;
      close(c->fd);
      if (c->busy) finish(c, 0);
      if (dial(c)) return 0;
    }
  }
  errors += flying;
  return now() - begin;
}

int main(int argc, char **argv) {
  int option;
  double warm_up_s = 0;
  while ((option = getopt(argc, argv, "+w:")) != -1)
    if (option == 'w') warm_up_s = atof(optarg);
    else return 2;
  argv += optind;
  argc -= optind;
  if (argc < 5 || (n_conns = atoi(argv[1])) < 1 || n_conns > MAX_CONNS) {
    fprintf(stderr, "usage: load [-w WARM_UP_S] PORT[,PORT...] CONNECTIONS SECONDS RATE "
                    "BODY_FILE [HEADER...]\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_TIMERSLACK, 1UL); /* ns: requests are due to the microsecond */
  for (char *part = strtok(argv[0], ","); part && n_ports < 64; part = strtok(NULL, ","))
    ports[n_ports++] = atoi(part);
  double seconds = atof(argv[2]), rate = atof(argv[3]);
  if (prepare(argv[4], argv + 5, argc - 5)) return 2;
  first_us = malloc(sizeof(double) * MAX_SAMPLES);
  total_us = malloc(sizeof(double) * MAX_SAMPLES);
  conns = calloc(n_conns, sizeof(conn));
  epfd = epoll_create1(0);
  for (int i = 0; i < n_conns; i++) {
    if (dial(&conns[i])) return 1;
    rest(&conns[i]);
  }
  puts("open");
  fflush(stdout);
  for (int c = getchar(); c != '\n' && c != EOF; c = getchar());
  next_mark = now() * 1e6; /* other numbers than an earlier run's */
  counted_from = now() + warm_up_s;
  counted_to = now() + seconds;
  double took_s = drive(seconds, rate);
  long n = done < MAX_SAMPLES ? done : MAX_SAMPLES;
  qsort(first_us, n, sizeof(double), ascending);
  qsort(total_us, n, sizeof(double), ascending);
  printf("{\"requests\": %ld, \"errors\": %ld, \"chunks\": %ld, \"seconds\": %.4f, \"rps\": %.1f, "
         "\"first_p50_us\": %.1f, \"first_p99_us\": %.1f, \"total_p50_us\": %.1f, \"total_p99_us\": %.1f, "
         "\"gap_p50_us\": %.0f, \"gap_p99_us\": %.0f}\n",
         done, errors, chunks_total, took_s, done / took_s, at(first_us, n, .5), at(first_us, n, .99),
         at(total_us, n, .5), at(total_us, n, .99), gap_at(.5), gap_at(.99));
  fflush(stdout);
  while (getchar() != EOF);
  return 0;
}
